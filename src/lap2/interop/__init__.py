"""Thin adapters to other libraries, each an optional extra: import the one you need by name."""
