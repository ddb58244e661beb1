"""Gemma 4 assistants: small drafters that attend to the keys and values of the model that they draft for. Imported only where one is used."""
