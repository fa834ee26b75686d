// The messages of the contract that the page reads, as protobuf's JSON has them: what is empty is
// left out, and 64-bit numbers are texts.

export interface Metric {
  name: string;
  num_points: number;
  last_step: number;
  last_value: number | null;
  update_time: string;
}

export interface Run {
  name: string;
  state?: string;
  base_model?: string;
  adapter?: { lora?: { rank?: number }; full?: object };
  display_name?: string;
  labels?: Record<string, string>;
  create_time?: string;
  waiting_for?: string;
  worker?: string;
  source_checkpoint?: string;
  num_pending_operations?: number;
  activity?: string;
  finish_time?: string;
  replay_diverged?: boolean;
  failure?: string;
  metrics?: Record<string, Metric>;
}

export interface Checkpoint {
  name: string;
  kind?: string;
  state?: string;
  version?: string;
  size_bytes?: string;
  create_time?: string;
  expire_time?: string;
  source_checkpoint?: string;
}

export interface Job {
  name: string;
  create_time?: string;
  spec?: { method?: { type?: string } };
  status?: {
    phase?: string;
    waiting_for?: string;
    progress?: { step?: number; max_steps?: number; percent?: number; eta?: string; reward?: string; run?: string };
    failure?: { reason?: string; message?: string };
    queued_time?: string;
    start_time?: string;
    completion_time?: string;
  };
}

export interface Episode {
  name: string;
  state?: string;
  queue?: string;
  type?: string;
  task_id?: string;
  client_id?: string;
  num_attempts?: number;
  max_attempts?: number;
  num_model_calls?: number;
  outcome?: { reward?: number; is_success?: boolean };
  failures?: string[];
  waiting_for?: string;
  create_time?: string;
  end_time?: string;
  trajectories?: Record<string, unknown>[];
}

export interface Match {
  name: string;
  state?: string;
  agents?: { agent: string; model?: string; state?: string; client_id?: string; failure?: string }[];
  next_barrier?: { epoch?: string; point?: string };
  num_games?: number;
  num_open_games?: number;
  num_epochs?: string;
  waiting_for?: string;
  failure?: string;
  create_time?: string;
  results?: { agent: string; games: number; mean: number; wins: number; elo: number; error: number }[];
}

export interface ServedModel {
  model?: {
    base_model?: string;
    num_parameters?: string;
    max_context_tokens?: number;
    exactness?: string;
    family?: string;
    dtype?: string;
  };
  trainable?: boolean;
  sampleable?: boolean;
  num_runs?: number;
  max_runs?: number;
}

export interface LoadedWeights {
  source?: string;
  version?: string;
  num_active_sequences?: number;
}

export interface Lists {
  runs: { training_runs?: Run[]; next_page_token?: string };
  jobs: { training_jobs?: Job[]; next_page_token?: string };
  episodes: { episodes?: Episode[]; next_page_token?: string };
  matches: { matches?: Match[]; next_page_token?: string };
  checkpoints: { checkpoints?: Checkpoint[]; next_page_token?: string };
  capabilities: { models?: ServedModel[] };
  samplers: { weights?: LoadedWeights[]; next_page_token?: string };
}

export type Topic = keyof Lists;
