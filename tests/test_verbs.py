"""Verbs: found by name, imported at the first call, never silently replaced."""

import pytest

from graphwright import verbs


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(verbs, "_TARGETS", {})


def test_a_verb_is_the_function_it_was_registered_for(table):
    import json

    verbs.register("dump", "json:dumps")
    verbs.register("dump", "json:dumps")
    assert verbs.verb("dump") is json.dumps


def test_a_second_meaning_is_refused(table):
    verbs.register("dump", "json:dumps")
    with pytest.raises(ValueError, match="json:dumps and json:loads"):
        verbs.register("dump", "json:loads")
    with pytest.raises(KeyError):
        verbs.verb("load")
