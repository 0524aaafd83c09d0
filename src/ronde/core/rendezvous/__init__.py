"""How nodes find each other, decided without a socket or a clock: `participant` is where to begin reading."""
