"""Generation with a trained model.

search_buffers       the tensors of a search, at fixed addresses that CUDA graphs can use
decoder              one decoding step of all hypotheses, and its CUDA graphs
prompts              the prompts of a language model, which its hypotheses begin with
ends                 ends hypotheses of the greatest length, as transformers does without eos
search               our search: beam search, diverse beam search, sampling
results              the hypotheses that a search has found, on the host
delayed_progress     tells the host, one step late, how many sentences are unfinished
parameter_addresses  checks that the parameters are still where graphs read them
texts                the results as text, for `Translator` and `LanguageModel`
incremental          the same decoding step under fairseq's own search
"""
