"""Problems from any source become batches of prompts in tokens.

Other wings take these modules:
  config        DataConfig, the section `data` of a config
  datasets      what a config names: stages of training, held-out problems
  curriculum    Curriculum: which problems come when, and which are solved
  pipeline      batches of prompts and demonstrations; `take` for evaluation
  messages      a message, read and checked
  prompt_batch  PromptBatch and DemonstrationBatch; PromptConfig
  sources       `load` and `mix` problems; `fingerprint` of a source
  problem       Problem
  readers       records of files and data sets
  tokenizers    `load` a tokenizer
  json_schema   what fits a schema of arguments
  tool_calls    calls of functions in the text of a response
Commands: prepare_tfds, tokenizers.train.
"""
