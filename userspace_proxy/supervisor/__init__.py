"""The daemon as processes: `supervisor` starts a control process and a data process, and either again when it dies."""
