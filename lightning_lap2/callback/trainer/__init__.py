"""The one room that touches Lightning: what is shadowed in a Trainer and its module, and read of private names."""
