package e2b

import (
	"slices"

	"github.com/cubesandbox/cube/orchestrator/admission"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// profileKey is the metadata by which a create says how much of what the sandbox has is reserved for it. E2B's SDKs have no other place
// for it.
const profileKey = "cube.profile"

// resourceBody is what there is of something: CPUs, or bytes.
type resourceBody struct {
	// Total is what sandboxes may have, Reserved what is set aside for those that there are.
	Total    float64 `json:"total"`
	Reserved float64 `json:"reserved"`
	// Used is what is really in use, by whomever.
	Used float64 `json:"used"`
	// Free is what is neither reserved nor in use.
	Free float64 `json:"free"`
}

func resource(total, reserved, used float64) resourceBody {
	return resourceBody{total, reserved, used, max(min(total-reserved, total-used), 0)}
}

type amountBody struct {
	CPU    float64 `json:"cpu"`
	Memory int64   `json:"memory"`
	Disk   int64   `json:"disk"`
}

func amount(a admission.Amount) amountBody {
	return amountBody{float64(a.MilliCPU) / 1000, a.Memory, a.Disk}
}

type pressureBody struct {
	CPU    float64 `json:"cpu"`
	Memory float64 `json:"memory"`
	IO     float64 `json:"io"`
}

// shareBody is a team's: what it has, and what it may have, 0 for any.
type shareBody struct {
	Running          int   `json:"running"`
	Paused           *int  `json:"paused,omitempty"`
	VCPUs            int   `json:"vcpus"`
	Memory           int64 `json:"memory"`
	Disk             int64 `json:"disk"`
	Snapshots        *int  `json:"snapshots,omitempty"`
	CreatesPerMinute *int  `json:"createsPerMinute,omitempty"`
}

type teamCapacityBody struct {
	TeamID string    `json:"teamID"`
	Used   shareBody `json:"used"`
	Limits shareBody `json:"limits"`
}

type roomBody struct {
	TemplateID string            `json:"templateID"`
	Names      []string          `json:"names"`
	Profile    admission.Profile `json:"profile"`
	CPUCount   int               `json:"cpuCount"`
	MemoryMB   int               `json:"memoryMB"`
	DiskSizeMB int               `json:"diskSizeMB"`
	// Reserved is what is set aside for each sandbox of it.
	Reserved amountBody `json:"reserved"`
	// Room is how many more there can be, Short what there isn't enough of for another one then.
	Room  int    `json:"room"`
	Short string `json:"short"`
}

type capacityBody struct {
	CPU    resourceBody `json:"cpu"`
	Memory resourceBody `json:"memory"`
	Disk   resourceBody `json:"disk"`
	// Spare is the part of what is reserved for machines that are kept ready.
	Spare amountBody `json:"spare"`
	// Pressure is in percent of the last ten seconds, null where the kernel doesn't tell.
	Pressure *pressureBody    `json:"pressure"`
	Running  int              `json:"running"`
	Paused   int              `json:"paused"`
	Team     teamCapacityBody `json:"team"`
	Rooms    []roomBody       `json:"templates"`
}

// capacity is what there is room for: of the newest templates, or of one.
func (s *Server) capacity(c *call) (answer, error) {
	name := c.query.text("template")
	if err := c.checked(); err != nil {
		return answer{}, err
	}
	var all []db.Template
	var err error
	if name == "" {
		all, err = s.templates.Templates(c.ctx, c.team, db.Page{Limit: maxPage})
	} else {
		all = make([]db.Template, 1)
		all[0], err = s.find(c, "template", name)
	}
	if err != nil {
		return answer{}, err
	}
	rooms, shapes := []roomBody{}, []admission.Shape{}
	for _, t := range all {
		builds, err := s.templates.Builds(c.ctx, t.ID)
		if err != nil {
			return answer{}, err
		}
		i := slices.IndexFunc(builds, func(b db.BuildInfo) bool { return b.State == db.JobReady })
		if i < 0 { // it is being made, or has been deleted since
			continue
		}
		b := builds[i]
		shape := admission.Shape{VCPUs: b.CPUs, MemoryMB: b.MemoryMB, DiskMB: b.DiskMB, Profile: admission.Profile(b.Profile)}
		_, names := namesOf(t)
		room := roomBody{TemplateID: t.ID, Names: names, Profile: admission.Disposable, CPUCount: b.CPUs, MemoryMB: b.MemoryMB, DiskSizeMB: b.DiskMB}
		if shape.Profile != "" {
			room.Profile = shape.Profile
		}
		rooms, shapes = append(rooms, room), append(shapes, shape)
	}
	told, err := s.engine.Capacity(c.team, shapes)
	if err != nil {
		return answer{}, err
	}
	for i, r := range told.Rooms {
		rooms[i].Reserved, rooms[i].Room, rooms[i].Short = amount(r.Reserved), r.Count, r.Short
	}
	body := capacityOf(c.team, told)
	body.Rooms = rooms
	return ok(body), nil
}

func capacityOf(team string, c lifecycle.Capacity) capacityBody {
	total, reserved := amount(c.Total), amount(c.Reserved)
	limits := c.Limits
	b := capacityBody{
		CPU:     resource(total.CPU, reserved.CPU, c.CPUsUsed),
		Memory:  resource(float64(total.Memory), float64(reserved.Memory), float64(c.MemoryTotal-c.MemoryAvailable)),
		Disk:    resource(float64(total.Disk), float64(reserved.Disk), float64(c.DiskTotal-c.DiskFree)),
		Spare:   amount(c.Spare),
		Running: c.Running, Paused: c.Paused,
		Team: teamCapacityBody{
			TeamID: team,
			Used:   shareBody{Running: c.Use.Running, Paused: &c.Use.Paused, VCPUs: c.Use.VCPUs, Memory: c.Use.Memory, Disk: c.Use.Disk},
			Limits: shareBody{Running: limits.Running, VCPUs: limits.VCPUs, Memory: int64(limits.Memory), Disk: int64(limits.Disk),
				Snapshots: &limits.Snapshots, CreatesPerMinute: &limits.CreatesPerMinute},
		},
	}
	if c.Pressure.Known {
		b.Pressure = &pressureBody{c.Pressure.CPU, c.Pressure.Memory, c.Pressure.IO}
	}
	return b
}
