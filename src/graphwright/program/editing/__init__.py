"""What an edit is: the primitive edits, the transaction and its verbs, commit, undo, journal and replay."""
