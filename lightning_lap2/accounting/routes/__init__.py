"""Routes to (epsilon, delta): each a class with ``usable``, ``epsilon`` and ``delta``; :mod:`.best` takes the best.

Every route is built from a :class:`~lightning_lap2.accounting.composition.Composition` and gives upper bounds, except
under ``bound="published"``.
"""
