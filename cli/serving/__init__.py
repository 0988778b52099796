"""``lightseq-serve``: models behind HTTP.

models         a served model: texts to requests of the device, and its results to texts
device         the process that has the models on a device
encoder        what this process does with a RoBERTa; generation.engine does the rest
engines        what the process of the server knows of it
app            the endpoints
completions    the answers of OpenAI's completions
guard          what is refused before a request is read
metrics        what Prometheus reads
bodies         their JSON
"""
