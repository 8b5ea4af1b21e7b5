"""Services that choose how to answer by what their parts say of labelled data."""
