"""Rules that find defects of a network, one file per family of rules, and the findings they return."""
