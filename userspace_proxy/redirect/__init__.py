"""Kernel rules: what is wanted is made true, and kept true, in the tables of this host."""
