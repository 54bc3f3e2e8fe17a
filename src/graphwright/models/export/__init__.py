"""Export: levels, writing, the check in a clean process, and the receipt."""
