"""Problems from anywhere become batches of token ids."""
