"""Gates: the view of them, and putting them in and taking them out."""
