from __future__ import annotations

import pytest

from tests.helpers import NAMESPACES, Namespace


@pytest.fixture(params=NAMESPACES)
def namespace(request: pytest.FixtureRequest) -> Namespace:
    """Each Lightning in turn, with the callback made for it."""
    return Namespace.named(request.param)
