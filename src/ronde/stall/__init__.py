"""Operations that wait too long: which ranks are missing, and where they are."""
