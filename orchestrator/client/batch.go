package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
)

// BatchRequest asks for a command to be run in many sandboxes.
type BatchRequest struct {
	Template string `json:"template"`
	// Command is a line for the sandbox's shell.
	Command string `json:"cmd"`
	// Count is how many items there are; 0 is as many as Envs.
	Count int `json:"count,omitempty"`
	// Envs are the items' own variables, EnvVars those of all.
	Envs     []map[string]string `json:"envs,omitempty"`
	EnvVars  map[string]string   `json:"envVars,omitempty"`
	Metadata map[string]string   `json:"metadata,omitempty"`
	// Timeout is an item's, Deadline the batch's, in seconds; 0 is as the API has it, and so is a Concurrency of 0.
	Timeout       int   `json:"timeout,omitempty"`
	Deadline      int   `json:"deadline,omitempty"`
	Concurrency   int   `json:"concurrency,omitempty"`
	AllowInternet *bool `json:"allow_internet_access,omitempty"`
}

// What has become of an item of a batch.
const (
	BatchOK      = "ok"
	BatchFailed  = "failed"
	BatchRefused = "refused" // it had no sandbox
	BatchTimeout = "timeout"
)

// BatchResult is an item's.
type BatchResult struct {
	Index     int    `json:"index"`
	SandboxID string `json:"sandboxID,omitempty"`
	Status    string `json:"status"`
	// ExitCode is nil if the command hasn't ended.
	ExitCode *int   `json:"exitCode,omitempty"`
	Error    string `json:"error,omitempty"`
	// Stdout and Stderr are the ends of what it has written; so many bytes are left out before.
	Stdout        string `json:"stdout"`
	Stderr        string `json:"stderr"`
	StdoutOmitted int64  `json:"stdoutOmitted,omitempty"`
	StderrOmitted int64  `json:"stderrOmitted,omitempty"`
	// How long it has waited, its sandbox was made, and its command ran, in milliseconds.
	WaitMS   int64 `json:"waitMs"`
	CreateMS int64 `json:"createMs"`
	RunMS    int64 `json:"runMs"`
}

// BatchSummary counts the results of a batch.
type BatchSummary struct {
	Count   int   `json:"count"`
	OK      int   `json:"ok"`
	Failed  int   `json:"failed"`
	Refused int   `json:"refused"`
	Timeout int   `json:"timeout"`
	TookMS  int64 `json:"tookMs"`
}

// Batch has a batch run, and calls each with the items' results as they come. When ctx ends, or each fails, the batch ends, and
// nothing is left of it.
func (c *Client) Batch(ctx context.Context, r BatchRequest, each func(BatchResult) error) (BatchSummary, error) {
	var sum BatchSummary
	err := c.lines(ctx, http.MethodPost, "/batch", nil, nil, r, func() {}, func(line string) (last bool, err error) {
		var head struct {
			Type string `json:"type"`
		}
		if err := json.Unmarshal([]byte(line), &head); err != nil {
			return false, fmt.Errorf("a line of the API's: %w", err)
		}
		switch head.Type {
		case "result":
			var r BatchResult
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				return false, fmt.Errorf("a result of the API's: %w", err)
			}
			return false, each(r)
		case "summary":
			return true, json.Unmarshal([]byte(line), &sum)
		case "error":
			return true, failure([]byte(line))
		}
		return false, nil // how far it is
	})
	return sum, err
}
