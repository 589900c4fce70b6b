package client

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/orchestrator/ingress/target"
)

// Sandbox is what the API tells of one.
type Sandbox struct {
	ID         string            `json:"sandboxID"`
	TemplateID string            `json:"templateID"`
	Alias      string            `json:"alias,omitempty"`
	State      string            `json:"state"` // "running" or "paused"
	StartedAt  time.Time         `json:"startedAt"`
	EndAt      time.Time         `json:"endAt"` // of a paused one, when it was paused
	CPUs       int               `json:"cpuCount"`
	MemoryMB   int               `json:"memoryMB"`
	DiskMB     int               `json:"diskSizeMB"`
	Metadata   map[string]string `json:"metadata"`
}

// detail is what is told of one that is asked for, which has secrets in it.
type detail struct {
	Sandbox
	Domain    string `json:"domain"`
	EnvdToken string `json:"envdAccessToken"`
	Lifecycle struct {
		AutoResume bool `json:"autoResume"`
	} `json:"lifecycle"`
}

// CheckID says whether a string can be a sandbox's id, which goes into URLs.
func CheckID(id string) error {
	if !target.ValidID(id) {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%q isn't a sandbox's id, which is made of a-z and 0-9: `cube ps` lists them", id))
	}
	return nil
}

// List is all sandboxes of the key's team, those that were started last first.
func (c *Client) List(ctx context.Context) ([]Sandbox, error) { return c.list(ctx, url.Values{}) }

// list is those that a filter is for.
func (c *Client) list(ctx context.Context, q url.Values) ([]Sandbox, error) {
	all, next := []Sandbox{}, ""
	q.Set("state", "running,paused")
	for {
		if next != "" {
			q.Set("nextToken", next)
		}
		var page []Sandbox
		header, err := c.get(ctx, "/v2/sandboxes", q, &page)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if next = header.Get("X-Next-Token"); next == "" {
			return all, nil
		}
	}
}

// Change is news of sandboxes.
type Change struct {
	// All says that Sandboxes are all that there are.
	All       bool
	Sandboxes []Sandbox
	Gone      []Sandbox // as they were last
}

// Watch calls each with all sandboxes of the team, and then with what has changed, until ctx ends or each fails. When the stream
// breaks off, it begins another one and tells what has changed meanwhile.
func (c *Client) Watch(ctx context.Context, each func(Change) error) error {
	var known map[string]Sandbox // nil: nothing was told yet
	again := func() bool { return true }
	return c.follow(ctx, "/sandboxes/events", nil, again, func(e event) error {
		change, err := news(&known, e.name, e.data)
		if err != nil || !change.All && len(change.Sandboxes)+len(change.Gone) == 0 {
			return err
		}
		return each(change)
	})
}

// news is what an event tells who knows that already.
func news(known *map[string]Sandbox, name string, data []byte) (Change, error) {
	var change Change
	var all []Sandbox
	var one Sandbox
	switch name {
	case "sandboxes":
		if err := json.Unmarshal(data, &all); err != nil {
			return change, err
		}
		was := *known
		*known = map[string]Sandbox{}
		change.All = was == nil
		for _, sb := range all {
			(*known)[sb.ID] = sb
			if old, ok := was[sb.ID]; !ok || !same(old, sb) {
				change.Sandboxes = append(change.Sandboxes, sb)
			}
			delete(was, sb.ID)
		}
		for _, id := range slices.Sorted(maps.Keys(was)) {
			change.Gone = append(change.Gone, was[id])
		}
	case "changed":
		if err := json.Unmarshal(data, &one); err != nil {
			return change, err
		}
		if !same((*known)[one.ID], one) {
			(*known)[one.ID] = one
			change.Sandboxes = []Sandbox{one}
		}
	case "gone":
		if err := json.Unmarshal(data, &one); err != nil {
			return change, err
		}
		if old, ok := (*known)[one.ID]; ok {
			delete(*known, one.ID)
			change.Gone = []Sandbox{old}
		}
	}
	return change, nil
}

// same says whether two states of a sandbox are told alike.
func same(a, b Sandbox) bool {
	return a.ID == b.ID && a.State == b.State && a.StartedAt.Equal(b.StartedAt) && a.EndAt.Equal(b.EndAt) && maps.Equal(a.Metadata, b.Metadata)
}

// LogEntry is one of a sandbox's log.
type LogEntry struct {
	Timestamp time.Time         `json:"timestamp"`
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields"`
}

// Logs calls each with the last tail entries of a sandbox's log, all if that is negative, and with follow then with what comes,
// until the sandbox is gone. When the stream breaks off, it begins another one and goes on where it was.
func (c *Client) Logs(ctx context.Context, id string, tail int, follow bool, each func(LogEntry) error) error {
	if err := CheckID(id); err != nil {
		return err
	}
	q := url.Values{"follow": {strconv.FormatBool(follow)}}
	if tail >= 0 {
		q.Set("tail", strconv.Itoa(tail))
	}
	lost := false // an entry after which nothing can go on
	again := func() bool { return !lost }
	return c.follow(ctx, "/sandboxes/"+id+"/logs/events", q, again, func(ev event) error {
		if ev.name != "log" {
			return nil
		}
		lost = ev.id == ""
		var e LogEntry
		if err := json.Unmarshal(ev.data, &e); err != nil {
			return err
		}
		return each(e)
	})
}
