"""A small patch transformer that forecasts multivariate time series."""
