package client

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"time"
)

// Create asks for a sandbox.
type Create struct {
	TemplateID string            `json:"templateID"`
	Timeout    int               `json:"timeout"` // seconds
	Secure     bool              `json:"secure"`
	Metadata   map[string]string `json:"metadata,omitempty"`
}

// Create makes a sandbox, and returns its id and the way into it.
func (c *Client) Create(ctx context.Context, w Create) (*Guest, error) {
	var d detail
	if err := c.call(ctx, http.MethodPost, "/sandboxes", w, &d); err != nil {
		return nil, err
	}
	if err := CheckID(d.ID); err != nil {
		return nil, err
	}
	return c.guest(d)
}

// Kill removes a sandbox, whatever it is doing.
func (c *Client) Kill(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, "/sandboxes/"+id, nil, nil)
}

// Pause saves a sandbox with its memory.
func (c *Client) Pause(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodPost, "/sandboxes/"+id+"/pause", nil, nil)
}

// Connect has a sandbox run for so long at least, and resumes it if it is paused.
func (c *Client) Connect(ctx context.Context, id string, d time.Duration) error {
	return c.call(ctx, http.MethodPost, "/sandboxes/"+id+"/connect", map[string]int{"timeout": int(d / time.Second)}, nil)
}

// Fork makes a child of a running sandbox that lives for so long.
func (c *Client) Fork(ctx context.Context, id string, d time.Duration) (*Guest, error) {
	var children []struct {
		Sandbox *detail `json:"sandbox"`
		Error   *struct {
			Code    int    `json:"code"`
			Message string `json:"message"`
		} `json:"error"`
	}
	if err := c.call(ctx, http.MethodPost, "/sandboxes/"+id+"/fork", map[string]int{"timeout": int(d / time.Second), "count": 1}, &children); err != nil {
		return nil, err
	}
	switch {
	case len(children) == 1 && children[0].Sandbox != nil:
		if err := CheckID(children[0].Sandbox.ID); err != nil {
			return nil, err
		}
		return c.guest(*children[0].Sandbox)
	case len(children) == 1 && children[0].Error != nil:
		return nil, classed(children[0].Error.Code, "the API", children[0].Error.Message)
	}
	return nil, errors.New("the API's answer to a fork has no child and no error")
}

// Snapshot makes a template of a running sandbox, and returns its id.
func (c *Client) Snapshot(ctx context.Context, id string) (string, error) {
	var s struct {
		ID string `json:"snapshotID"`
	}
	err := c.call(ctx, http.MethodPost, "/sandboxes/"+id+"/snapshots", map[string]string{}, &s)
	return s.ID, err
}

// DeleteTemplate deletes a template or snapshot.
func (c *Client) DeleteTemplate(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, "/templates/"+url.PathEscape(id), nil, nil)
}

// Marked are the ids of the sandboxes whose metadata has that, those that run and those that are paused.
func (c *Client) Marked(ctx context.Context, key, value string) ([]string, error) {
	pair := url.QueryEscape(key) + "=" + url.QueryEscape(value)
	all, err := c.list(ctx, url.Values{"metadata": {pair}})
	ids := make([]string, 0, len(all))
	for _, sb := range all {
		ids = append(ids, sb.ID)
	}
	return ids, err
}
