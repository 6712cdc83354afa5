"""Packages that bring their own LightningModule or loader, trained privately as their users would: ``make field``.

* ``cases.py``: what a package is, and what one way of training a model of it is (:class:`Package`, :class:`Case`);
* ``packages/``: one module for each package, found by itself; it says ``PACKAGE = Package(...)`` and imports the
  package inside its cases only;
* ``environments.py``: one virtual environment for each group of requirements;
* ``run_case.py``: one case in a process of its own, which writes what came of it as JSON;
* ``watch.py``: callbacks that measure steps and compare gradients;
* ``page.py``: ``docs/packages.md`` from these results.
"""
