"""Results for people and programs: table, JSON, CSV, .hgrm, HTML. Nothing here computes what the others do not show."""
