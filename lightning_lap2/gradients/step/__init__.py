"""The user's step, seen from one record: called, recorded, kept from what is not its own."""
