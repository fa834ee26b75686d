"""The gateway's database: what HTTP clients were promised and no other pod keeps."""
