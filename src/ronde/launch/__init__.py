"""The launcher: it plans which workers run on a machine, starts them and supervises them."""
