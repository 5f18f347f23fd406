"""The load: processes that ask, note when they asked and were answered by whom, and watch themselves.

A process is told one `Job` after the other and answers each with one `Raw`. It writes down plain numbers while the load
runs and counts, sorts and merges nothing until it is over.
"""
