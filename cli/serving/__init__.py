"""``lightseq-serve``: models behind HTTP.

models         a served model: texts to requests of an engine, and its results to texts
device         the process that has the models on a device, and searches
engines        what the process of the server knows of it
app            the endpoints
bodies         their JSON
"""
