"""A data path in another process: `plane` is what stands in for it here, `server` is what runs there."""
