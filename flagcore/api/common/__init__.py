"""What every task of the API needs: inputs, the run folder, the context of a run, warnings."""
