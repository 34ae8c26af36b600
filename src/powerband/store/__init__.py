"""Files on disk: documents, journals, request records and run directories."""
