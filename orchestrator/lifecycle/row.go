package lifecycle

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
)

// row is all that is known of a sandbox. What has been published isn't changed: see clone.
type row struct {
	ID, Team            string
	TemplateID, BuildID string
	State               State
	StartedAt, EndAt    time.Time
	Metadata            map[string]string
	spec
	// ask is that of whoever waits for it to be made. Of what was done last, failed is why it has come to nothing, and saved the
	// snapshot that has been made.
	ask    *ask
	failed error
	saved  string
	// addr is where it is reached while it runs.
	addr netip.Addr
	// rewinding: it is being rolled back. Nobody gets in until it knows who it is.
	rewinding bool
	// seq counts the rows that others have seen of this sandbox in the engine's life.
	seq uint64
}

// spec is what the database needn't understand.
type spec struct {
	Alias string `json:"alias,omitempty"`
	// Timeout is what it was created with.
	Timeout         time.Duration     `json:"timeout"`
	CPUs            int               `json:"cpus"`
	MemoryMB        int               `json:"memory"`
	DiskMB          int               `json:"disk"`
	Profile         admission.Profile `json:"profile,omitempty"`
	Env             map[string]string `json:"env,omitempty"`
	Network         Network           `json:"network"`
	AllowInternet   *bool             `json:"allowInternet,omitempty"`
	AutoPause       bool              `json:"autoPause,omitempty"`
	AutoPauseMemory bool              `json:"autoPauseMemory,omitempty"`
	AutoResume      bool              `json:"autoResume,omitempty"`
	Secure          bool              `json:"secure,omitempty"`
	Ephemeral       bool              `json:"ephemeral,omitempty"`
	// Settings are its build's.
	Settings db.Settings `json:"settings"`
	// Origin is the sandbox that its first machine was saved of, "" if that was of none.
	Origin string `json:"origin,omitempty"`
	// Cold: it is paused without its memory, or is going to be.
	Cold bool `json:"cold,omitempty"`
	// Epoch is one life of its machine: what was connected to another isn't any more.
	Epoch string `json:"epoch,omitempty"`
	// Request is the request that its latest life is of.
	Request string `json:"request,omitempty"`
	// Next is how long it is to run when it has been resumed, as it is being.
	Next time.Duration `json:"next,omitempty"`
	// Requests are those of InitAgain that are done, the latest last.
	Requests []string `json:"requests,omitempty"`
	// Key is the id of the API key that has made it, "" if none has.
	Key string `json:"key,omitempty"`
	// Cause is what its state has come of, nil for one at rest.
	Cause *cause `json:"cause,omitempty"`
	// Reason is why it is being killed, "" where somebody asked for it.
	Reason string `json:"reason,omitempty"`
}

// clone is a row that can be changed: but for what is replaced as a whole, maps, slices and what is pointed to.
func (r *row) clone() *row {
	c := *r
	return &c
}

func (r *row) encode() (db.Sandbox, error) {
	b, err := json.Marshal(r.spec)
	return db.Sandbox{ID: r.ID, Team: r.Team, Template: r.TemplateID, Build: r.BuildID, State: string(r.State),
		StartedAt: r.StartedAt, Deadline: r.EndAt, Metadata: r.Metadata, Spec: b}, err
}

func decodeRow(s db.Sandbox) (*row, error) {
	r := &row{ID: s.ID, Team: s.Team, TemplateID: s.Template, BuildID: s.Build, State: State(s.State), StartedAt: s.StartedAt, EndAt: s.Deadline, Metadata: s.Metadata}
	if err := json.Unmarshal(s.Spec, &r.spec); err != nil {
		return nil, fmt.Errorf("the row of sandbox %s: %w", s.ID, err)
	}
	if _, ok := table[r.State]; !ok {
		return nil, fmt.Errorf("the row of sandbox %s has state %q, which this cube doesn't know", s.ID, s.State)
	}
	return r, nil
}

// sandbox is the row as others see it.
func (e *Engine) sandbox(r *row) Sandbox {
	s := Sandbox{
		ID: r.ID, Team: r.Team, TemplateID: r.TemplateID, Alias: r.Alias, BuildID: r.BuildID, State: r.State, StartedAt: r.StartedAt, EndAt: r.EndAt,
		CPUs: r.CPUs, MemoryMB: r.MemoryMB, DiskMB: r.DiskMB, Metadata: maps.Clone(r.Metadata), Env: maps.Clone(r.Env),
		Network: r.Network.clone(), AllowInternet: clonePtr(r.AllowInternet), AutoPause: r.AutoPause, AutoPauseMemory: r.AutoPauseMemory, AutoResume: r.AutoResume,
		Secure: r.Secure, EnvdVersion: r.Settings.EnvdVersion,
	}
	s.EnvdToken, s.TrafficToken = e.tokens(r)
	return s
}

// tokens are the row's, "" where it has none.
func (e *Engine) tokens(r *row) (envd, traffic string) {
	if r.Secure {
		envd = e.seed.envd(r.ID)
	}
	if !r.public() {
		traffic = e.seed.traffic(r.ID)
	}
	return envd, traffic
}

// public tells whether requests need no traffic token.
func (r *row) public() bool {
	return r.Network.AllowPublicTraffic == nil || *r.Network.AllowPublicTraffic
}

func (n Network) clone() Network {
	n.AllowPublicTraffic = clonePtr(n.AllowPublicTraffic)
	n.AllowOut, n.DenyOut, n.HTTPSPorts = slices.Clone(n.AllowOut), slices.Clone(n.DenyOut), slices.Clone(n.HTTPSPorts)
	return n
}

func clonePtr[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}
