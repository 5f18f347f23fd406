"""The servers behind the targets: each is a process of its own, says who it is, and misbehaves when told to."""
