"""Job files made by chance from the fields of the models: most sensible, many broken. Nothing here knows a server."""
