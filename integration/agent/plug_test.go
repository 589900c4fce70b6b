package agent

import (
	"context"
	"encoding/json"
	"testing"
	"time"
)

// plugged is a disk of a machine.
type plugged struct {
	serial, image string
	lun           int
}

// plug plugs an image in.
func (m *machine) plug(t *testing.T, serial, image string) {
	t.Helper()
	ctx := contextFor(t, 20*time.Second)
	m.do(ctx, t, "blockdev-add", map[string]any{
		"driver": "raw", "node-name": serial, "file": map[string]any{"driver": "file", "filename": image},
	})
	m.do(ctx, t, "device_add", map[string]any{
		"driver": "scsi-hd", "id": "disk-" + serial, "drive": serial, "bus": "scsi0.0", "lun": m.lun, "serial": serial,
	})
	m.disks = append(m.disks, plugged{serial: serial, image: image, lun: m.lun})
	m.lun++
}

// unplug takes it out.
func (m *machine) unplug(t *testing.T, serial string) {
	t.Helper()
	ctx := contextFor(t, 20*time.Second)
	events := m.qmp.Subscribe("DEVICE_DELETED")
	defer events.Close()
	m.do(ctx, t, "device_del", map[string]any{"id": "disk-" + serial})
	for {
		select {
		case e := <-events.C():
			var data struct{ Device string }
			if err := json.Unmarshal(e.Data, &data); err != nil {
				t.Fatal(err)
			}
			if data.Device == "disk-"+serial {
				m.do(ctx, t, "blockdev-del", map[string]any{"node-name": serial})
				return
			}
		case <-ctx.Done():
			t.Fatalf("disk %s isn't let go", serial)
		}
	}
}

func (m *machine) do(ctx context.Context, t *testing.T, command string, args map[string]any) {
	t.Helper()
	if err := m.qmp.Do(ctx, command, args, nil); err != nil {
		t.Fatal(err)
	}
}
