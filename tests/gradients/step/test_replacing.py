"""What is replaced while a step runs is put back; what the user replaces meanwhile is what is called."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from lightning_lap2.gradients.step.replacing import Replacements


def _louder(original: Callable[[], str]) -> Callable[[], str]:
    return lambda: original() + "!"


class Parent:
    @staticmethod
    def name() -> str:
        return "parent"


def test_an_inherited_attribute_is_inherited_again() -> None:
    class Child(Parent):
        pass

    replacements = Replacements([(Child, "name", _louder)])
    for _ in range(2):
        with replacements.active():
            assert Child.name() == "parent!"
            assert Parent.name() == "parent"
        assert "name" not in vars(Child)


def test_all_are_put_back_after_an_error_and_after_what_was_done_inside() -> None:
    def one() -> str:
        return "one"

    owner = SimpleNamespace(one=one, two=one)
    both = Replacements([(owner, "one", _louder), (owner, "two", _louder)])
    with pytest.raises(AttributeError, match="tree"), both.active():
        del owner.one, owner.tree
    assert owner.one is one and owner.two is one
    with pytest.raises(AttributeError), Replacements([(owner, "one", _louder), (owner, "absent", _louder)]).active():
        pass
    assert owner.one is one


def test_a_stand_in_is_made_once_and_anew_where_the_user_has_replaced_the_function() -> None:
    made = []

    def make(original: Callable[[], str]) -> Callable[[], str]:
        made.append(original)
        return _louder(original)

    owner = SimpleNamespace(name=lambda: "first")
    replacements = Replacements([(owner, "name", make)])
    for _ in range(3):
        with replacements.active():
            assert owner.name() == "first!"
    owner.name = lambda: "second"
    with replacements.active():
        assert owner.name() == "second!"
        with replacements.active():  # within itself
            assert owner.name() == "second!!"
        assert owner.name() == "second!"
    assert owner.name() == "second"
    assert len(made) == 3
