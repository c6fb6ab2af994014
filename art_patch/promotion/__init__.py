"""From a verdict to a served policy: states and moves as data, promote and roll back, and the test of a challenger."""
