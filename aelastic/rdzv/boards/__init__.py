"""What a board can be made of, a room each."""
