"""What a plan says of itself: in words, beside another plan, and in time."""
