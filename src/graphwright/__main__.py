"""`python -m graphwright` is the same as `graphwright`."""

from graphwright.cli import main

main()
