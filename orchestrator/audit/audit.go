// Package audit keeps the record of what was done with sandboxes, snapshots, templates and keys: for whom, and what has come of
// it. It is a file of lines of JSON that is only added to; see Log for what is on the disk when. It knows nothing of what is done.
//
// There is nothing in it that a sandbox or a client may have written but ids, names of snapshots and templates, and the id of a
// request: neither keys, tokens and variables nor the texts of errors, which may quote them.
package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

// Action is what is done.
type Action string

const (
	Create   Action = "create"   // a sandbox, of a template
	Restore  Action = "restore"  // a sandbox, of a snapshot of one
	Fork     Action = "fork"     // the sandbox itself, for its children, and each child, which has an Origin
	Snapshot Action = "snapshot" // of a sandbox
	Rollback Action = "rollback"
	Init     Action = "init"    // another environment
	Network  Action = "network" // what it may reach
	Pause    Action = "pause"
	Resume   Action = "resume"
	Kill     Action = "kill"
	End      Action = "end" // of a sandbox by itself, or by somebody who hasn't asked Cube
	Build    Action = "build"
	Push     Action = "push"   // a template's build, to a registry
	Delete   Action = "delete" // a snapshot or a template
	Purge    Action = "purge"  // a team, with all that it has

	KeyCreate Action = "key-create"
	KeyRevoke Action = "key-revoke"

	// Gap is of the record itself: entries before this one couldn't be written. They are in the daemon's log.
	Gap Action = "gap"
)

// Via is how it came to it.
type Via string

const (
	API       Via = "api"       // a request with a key
	CLI       Via = "cli"       // `cube` on this machine
	Deadline  Via = "deadline"  // the sandbox's own
	Traffic   Via = "traffic"   // a request into a paused sandbox
	Retention Via = "retention" // what is kept for how long
	Purging   Via = "purge"     // of the team
	Host      Via = "host"      // nobody has asked Cube for it
)

// Result is what has come of it.
type Result string

const (
	OK     Result = "ok"
	Failed Result = "failed"
)

// By is on whose behalf something is done.
type By struct {
	Via Via `json:"via"`
	// Key is the id of the API key, never the key.
	Key string `json:"key,omitempty"`
	// Request is the request's id, as the client was told it.
	Request string `json:"request,omitempty"`
	// From is the client's address and port, as the host sees them.
	From string `json:"from,omitempty"`
}

// Entry is one line of the record.
type Entry struct {
	Time   time.Time `json:"time"` // when that had come of it
	Action Action    `json:"action"`
	Result Result    `json:"result"`
	// Error is the class of why it has failed; see Class.
	Error string `json:"error,omitempty"`
	Team  string `json:"team,omitempty"`
	By
	Sandbox string `json:"sandbox,omitempty"`
	// Origin is the sandbox that this one, or the snapshot, was saved of.
	Origin string `json:"origin,omitempty"`
	// Template and Build are ids.
	Template string `json:"template,omitempty"`
	Build    string `json:"build,omitempty"`
	// Snapshot is one of a sandbox, or a template, as its user calls it.
	Snapshot string `json:"snapshot,omitempty"`
	// Subject is the id of a key that was made or revoked.
	Subject string `json:"subject,omitempty"`
	// Why is what nobody has asked for: the reason.
	Why string `json:"why,omitempty"`
}

// Recorder takes entries; a Log is one.
type Recorder interface {
	// Record has an entry in the record when it returns.
	Record(Entry)
	// Ready tells why nothing can be recorded, nil if it can.
	Ready() error
}

// Nowhere takes entries and keeps none.
type Nowhere struct{}

func (Nowhere) Record(Entry) {}

// Ready is of Recorder.
func (Nowhere) Ready() error { return nil }

// Outcome is an entry's Result and Error for an error.
func Outcome(err error) (Result, string) {
	if err == nil {
		return OK, ""
	}
	return Failed, Class(err)
}

// classes are the words for classes of errdefs, the first that fits.
var classes = []struct {
	is   func(error) bool
	word string
}{
	{errdefs.IsResourceExhausted, "resource_exhausted"},
	{errdefs.IsNotFound, "not_found"},
	{errdefs.IsAlreadyExists, "already_exists"},
	{errdefs.IsInvalidArgument, "invalid_argument"},
	{errdefs.IsPermissionDenied, "permission_denied"},
	{errdefs.IsUnauthorized, "unauthenticated"},
	{errdefs.IsFailedPrecondition, "failed_precondition"},
	{errdefs.IsAborted, "aborted"},
	{errdefs.IsCanceled, "canceled"},
	{errdefs.IsDeadlineExceeded, "deadline_exceeded"},
	{errdefs.IsUnavailable, "unavailable"},
}

// Class is the class of an error in a word, "internal" where it has none.
func Class(err error) string {
	for _, c := range classes {
		if c.is(err) {
			return c.word
		}
	}
	return "internal"
}

type byKey struct{}

// With has what is done in the context be on somebody's behalf.
func With(ctx context.Context, by By) context.Context { return context.WithValue(ctx, byKey{}, by) }

// Of is on whose behalf something is done in the context.
func Of(ctx context.Context) By {
	by, _ := ctx.Value(byKey{}).(By)
	return by
}

// Filter picks entries; what is zero picks all.
type Filter struct {
	Team string
	// Sandbox is the id of one, whose children and snapshots are picked, too.
	Sandbox string
	Since   time.Time
}

// Has tells whether an entry is one of them.
func (f Filter) Has(e Entry) bool {
	return (f.Team == "" || e.Team == f.Team) && (f.Sandbox == "" || e.Sandbox == f.Sandbox || e.Origin == f.Sandbox) && !e.Time.Before(f.Since)
}

// Parse reads a line of the record.
func Parse(line []byte) (Entry, error) {
	var e Entry
	if err := json.Unmarshal(line, &e); err != nil {
		return e, fmt.Errorf("a line of the audit log: %w", err)
	}
	if e.Time.IsZero() || e.Action == "" {
		return e, errors.New("a line of the audit log has no time or no action")
	}
	return e, nil
}
