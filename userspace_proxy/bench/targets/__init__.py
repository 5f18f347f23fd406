"""Who is measured: started, configured and told of endpoints by us, or running already."""
