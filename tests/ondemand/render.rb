# Renders the Open OnDemand app as its dashboard does (ERB, YAML, merged sub-apps; values arrive as strings), and stages a session
# with a job script around its template: ruby render.rb APP SESSION '{"sub_app": "preset", "values": {"hours": "4"}, "work": true}'
# Prints JSON: form, submit and, if asked for, the rendered pages. Ruby's own library only.

require "cgi"
require "erb"
require "fileutils"
require "json"
require "ostruct"
require "pathname"
require "yaml"

APP = Pathname.new(ARGV[0]).realpath
SESSION = Pathname.new(ARGV[1])
ASKED = JSON.parse(ARGV[2] || "{}")

def rendered(path, binding)
  erb = ERB.new(path.read, trim_mode: "-")
  erb.filename = path.to_s
  erb.result(binding)
end

def read(path, binding = TOPLEVEL_BINDING)
  YAML.safe_load(path.extname == ".erb" ? rendered(path, binding) : path.read).to_h
end

def merge(one, other)
  one.merge(other) { |_, a, b| a.is_a?(Hash) && b.is_a?(Hash) ? merge(a, b) : b }
end

form = read(APP.join("form.yml.erb"))
if ASKED["sub_app"]
  sub = %w[.yml.erb .yml].map { |ending| APP.join("local", ASKED["sub_app"] + ending) }.find(&:file?)
  form = merge(form, read(sub))
end
defaults = form["form"].to_h do |id|
  attribute = form["attributes"].fetch(id, {})
  [id, (attribute.is_a?(Hash) ? attribute["value"] : attribute).to_s]
end
fixed = form["form"].all? { |id| !form["attributes"].fetch(id, {}).is_a?(Hash) }
context = OpenStruct.new(defaults.merge(ASKED["values"] || {}))
submit = read(APP.join("submit.yml.erb"), context.instance_eval { binding })
result = {form: form, preset: fixed, submit: submit}

Session = Struct.new(:app, :staged_root, :id) do
  def completed?
    ASKED["completed"] || false
  end

  def page(path, names = {})
    scope = binding
    names.each { |name, value| scope.local_variable_set(name, value) }
    rendered(path, scope)
  end
end
session = Session.new(OpenStruct.new(root: APP), SESSION, "session-1")

if ASKED["connection"]
  result[:view] = session.page(APP.join("view.html.erb"), ASKED["connection"])
end
result[:info] = session.page(APP.join("info.md.erb"))
result[:completed] = session.page(APP.join("completed.md.erb"))

if ASKED["stage"]
  FileUtils.cp_r("#{APP}/template/.", SESSION)
  scope = Struct.new(:session, :context).new(session, context).instance_eval { binding }
  SESSION.glob("**/*.erb").each do |file|
    target = file.sub_ext("")
    target.write(ERB.new(file.read, trim_mode: "-").result(scope))
    target.chmod(file.stat.mode)
  end
  names = (submit.dig("batch_connect", "conn_params") || []) + %w[host port password]
  # What the "basic" template promises to before.sh and after.sh: port_used, find_port, create_passwd, clean_up.
  SESSION.join("job.sh").write(<<~JOB)
    cd "#{SESSION}"
    port_used() { (: < "/dev/tcp/${1%%:*}/${1##*:}") 2> /dev/null; }
    find_port() {  # as with a site's max_port of 32000: Linux gives the ports above 32767 to connections
        for number in $(shuf -i "${2:-2000}-${3:-32000}" -n 50); do
            port_used "${1:-localhost}:$number" || { echo "$number"; return 0; }
        done
        return 1
    }
    create_passwd() { tr -cd 'a-zA-Z0-9' < /dev/urandom | head -c "${1:-8}"; }
    clean_up() {
        echo "cleaning up"
        pkill -P ${SCRIPT_PID:-$$} || :
        pkill -P $$ || :
        exit "${1:-0}"
    }
    host=$(hostname)
    export host
    source ./before.sh
    ./script.sh &
    SCRIPT_PID=$!
    source ./after.sh
    (umask 077; echo -e "#{names.map { |name| "#{name}: $#{name}" }.join('\n')}" > connection.yml)
    wait $SCRIPT_PID || clean_up 1
    clean_up
  JOB
end

puts JSON.pretty_generate(result)
