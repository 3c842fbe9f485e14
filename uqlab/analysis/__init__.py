"""What members, layers and heads are like: diversity, spectra, representations."""
