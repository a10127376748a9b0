-- What slurm.conf cannot say without an accounting database: QOS with nodes and minutes, no --mem, 20 cores a GPU.
local limits = {
    acc_debug = {8, 2 * 60}, acc_interactive = {1, 2 * 60}, acc_training = {4, 48 * 60}, acc_ehpc = {100, 72 * 60},
    acc_bsccase = {25, 48 * 60}, acc_bsccs = {25, 48 * 60}, acc_bsces = {25, 48 * 60}, acc_bscls = {25, 48 * 60},
    acc_resa = {50, 72 * 60}, acc_resb = {50, 48 * 60}, acc_resc = {10, 24 * 60},
}

local function refuse(words)
    slurm.log_user("the model of MareNostrum 5: " .. words)
    return slurm.ERROR
end

function slurm_job_submit(job, partitions, user)
    if job.account == nil or job.qos == nil or limits[job.qos] == nil then
        return refuse("--account and a known --qos are needed")
    end
    -- Slurm's numbers for "not said" are the largest there are.
    if job.pn_min_memory < 2 ^ 40 or string.match(job.mem_per_tres or "", "gpu") then
        return refuse("--mem is not accepted, memory comes with the cores")
    end
    local nodes, minutes = limits[job.qos][1], limits[job.qos][2]
    if job.min_nodes > nodes or job.time_limit > minutes then
        return refuse(job.qos .. " gives a job at most " .. nodes .. " nodes and " .. minutes .. " minutes")
    end
    local gpus = tonumber(string.match(job.tres_per_node or "", "(%d+)$") or "0")
    local tasks = job.ntasks_per_node < 65534 and job.ntasks_per_node or 1
    local cores = job.cpus_per_task < 65534 and job.cpus_per_task or 1
    if tasks * cores < gpus * 20 then
        return refuse("cores must be at least nodes x GPUs x 20")
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, user)
    return slurm.SUCCESS
end
