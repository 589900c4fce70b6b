package client

import (
	"context"
	"net/url"
)

// Resource is what the host has of something, in CPUs or bytes.
type Resource struct {
	// Total is what sandboxes may have, Reserved what is set aside for those that there are, Used what is really in use, and Free
	// what is neither.
	Total    float64 `json:"total"`
	Reserved float64 `json:"reserved"`
	Used     float64 `json:"used"`
	Free     float64 `json:"free"`
}

// Amount is CPUs, and bytes of memory and disk.
type Amount struct {
	CPU    float64 `json:"cpu"`
	Memory int64   `json:"memory"`
	Disk   int64   `json:"disk"`
}

// Pressure is of what share of the last ten seconds, in percent, something on the host has waited for each.
type Pressure struct {
	CPU    float64 `json:"cpu"`
	Memory float64 `json:"memory"`
	IO     float64 `json:"io"`
}

// Share is what a team has, or may have, where 0 is any; sizes are in bytes.
type Share struct {
	Running          int   `json:"running"`
	Paused           int   `json:"paused,omitempty"`
	VCPUs            int   `json:"vcpus"`
	Memory           int64 `json:"memory"`
	Disk             int64 `json:"disk"`
	Snapshots        int   `json:"snapshots,omitempty"`
	CreatesPerMinute int   `json:"createsPerMinute,omitempty"`
}

// Room is how many more sandboxes of a template there can be.
type Room struct {
	TemplateID string   `json:"templateID"`
	Names      []string `json:"names"`
	Profile    string   `json:"profile"`
	CPUs       int      `json:"cpuCount"`
	MemoryMB   int      `json:"memoryMB"`
	DiskMB     int      `json:"diskSizeMB"`
	// Reserved is what is set aside for each.
	Reserved Amount `json:"reserved"`
	Count    int    `json:"room"`
	// Short is what there isn't enough of for another one then.
	Short string `json:"short"`
}

// Capacity is what a host, and a team, have room for.
type Capacity struct {
	CPU      Resource  `json:"cpu"`
	Memory   Resource  `json:"memory"`
	Disk     Resource  `json:"disk"`
	Spare    Amount    `json:"spare"`
	Pressure *Pressure `json:"pressure"` // nil: it isn't known
	Running  int       `json:"running"`
	Paused   int       `json:"paused"`
	Team     struct {
		ID     string `json:"teamID"`
		Used   Share  `json:"used"`
		Limits Share  `json:"limits"`
	} `json:"team"`
	Templates []Room `json:"templates"`
}

// Capacity asks what there is room for, of all templates or, unless that is "", of one.
func (c *Client) Capacity(ctx context.Context, template string) (told Capacity, err error) {
	q := url.Values{}
	if template != "" {
		q.Set("template", template)
	}
	_, err = c.get(ctx, "/capacity", q, &told)
	return told, err
}
