"""PURE: from results to what may be said of a target. No I/O, no clock; randomness is seeded.

Each module answers one question and says "unknown" where the samples do not carry an answer.
"""
