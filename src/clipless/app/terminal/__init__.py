"""What commands write to the terminal, and the signals that reach them."""
