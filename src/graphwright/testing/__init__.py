"""Harnesses that prove properties of code: public, and tested themselves with planted bugs."""
