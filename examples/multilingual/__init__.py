"""A model of several languages, from a folder of Hugging Face to captions and back."""
