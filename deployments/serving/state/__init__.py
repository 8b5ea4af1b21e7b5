"""State that outlives planners and nodes: records with generations, in a folder or an object storage."""
