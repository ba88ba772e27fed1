"""The methods of the Sine-Line benchmark, each with the settings that are searched for it."""
